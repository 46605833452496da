"""The preallocated KV cache: storage, the end of a prompt, the decode step."""
