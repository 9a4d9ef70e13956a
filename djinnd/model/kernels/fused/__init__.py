"""Small operations of a family in one launch each: norms, rotary embedding, gates, and edits of rows."""
