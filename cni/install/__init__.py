"""The relay on the host, and the plugin in the cluster network's configuration."""
