"""The room that knows transformers: models, the cache, the attention function, sessions."""
