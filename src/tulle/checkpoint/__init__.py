"""Checkpoints: complete or absent, for any number of ranks and any plan, and plain PyTorch states for all others."""

from tulle.checkpoint.loading import load
from tulle.checkpoint.safetensors import save_safetensors
from tulle.checkpoint.saving import save
from tulle.checkpoint.whole import full_optimizer_state_dict, full_state_dict

__all__ = ["full_optimizer_state_dict", "full_state_dict", "load", "save", "save_safetensors"]
