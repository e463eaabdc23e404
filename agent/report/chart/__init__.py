"""How a node hangs together, for people: the PCIe tree, the locality matrix, and a drawing of both. Pure."""
