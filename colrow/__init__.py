"""colrow: tensor parallelism for any Hugging Face transformer, with the proof that the split model equals the whole one."""

__version__ = "0.1.0"
