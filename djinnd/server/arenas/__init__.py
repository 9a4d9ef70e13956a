"""The arena: shared-memory objects with weights and pages, which outlive engines and daemons."""
