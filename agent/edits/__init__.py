"""From a unit or a device to what its container gets: device nodes, variables, mounts, CDI specs."""
