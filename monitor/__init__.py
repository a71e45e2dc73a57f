"""Watches runs and GPUs from beside: processes of their own, that never import torch."""
