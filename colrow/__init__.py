"""colrow splits any Hugging Face transformer over several devices with tensor parallelism and proves that the split model equals the whole one."""

__version__ = "0.1.0"
