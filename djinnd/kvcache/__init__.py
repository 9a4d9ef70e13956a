"""Where the KV of sessions is: pages and page tables. Bookkeeping only; the bytes belong to the device."""
