"""The operator's socket, and what is asked over it: release, pause-gpus, uninstall."""
