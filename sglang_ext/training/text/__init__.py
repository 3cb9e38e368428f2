"""From published packages (or a folder of text files) to de-duplicated, split documents in JSON lines."""
