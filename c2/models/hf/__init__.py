"""Checkpoints in the format of Hugging Face transformers: reading and writing.

cfg, params = hf.load("DeepSeek-V3")
hf.save(params, cfg, "tuned")
"""

from c2.models.hf.loader import load
from c2.models.hf.writer import save

__all__ = ["load", "save"]
