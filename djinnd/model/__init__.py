"""How a family's own modules are run block by block over flat buffers and paged KV."""
