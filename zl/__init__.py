"""zl: an LLM inference server without the layers between socket and GPU."""

__version__ = "0.1.0"
