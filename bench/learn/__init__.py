"""Makes the page of `rooflab learn`: one real run of a small model, from its tokens down to bytes on a GPU."""
