"""Tool calls as the families of models write them: as JSON, Python or tags, behind markers or on channels."""
