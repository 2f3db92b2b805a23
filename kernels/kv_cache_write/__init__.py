"""kv_cache_write."""
