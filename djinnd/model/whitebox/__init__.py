"""The interface by which edits and captures reach activations during a step."""
