"""The HTTP server: OpenAI's API on top of the engine. The parent process speaks HTTP, the ranks compute; they meet in bridge.py."""
