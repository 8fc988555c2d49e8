"""From the text a model writes to the parts of a message: reasoning, content, tool calls."""
