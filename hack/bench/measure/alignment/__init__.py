"""How well GPUs and NICs of one pod stand together, on recorded nodes, for several ways of choosing."""
