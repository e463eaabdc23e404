"""One module per way to bring a device into a pod; `choice` tells which is used, `mode` what each can do."""
