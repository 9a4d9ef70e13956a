"""Looking and changing inside the model, as steps: captures, edits, breakpoints, interventions."""
