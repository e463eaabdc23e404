"""How well GPUs and NICs of one pod stand together, on modelled nodes, for several ways of choosing."""
