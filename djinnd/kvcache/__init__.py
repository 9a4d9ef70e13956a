"""Pages of KV: block tables, the device's page pool, the host and disk tiers, and moves between them. Bookkeeping only;
it never touches device memory."""
