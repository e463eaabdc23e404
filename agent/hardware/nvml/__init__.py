"""GPUs as the NVIDIA driver's library (NVML) shows them, and their device files."""
