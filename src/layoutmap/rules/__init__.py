"""Map names to layouts: rule sets, rules files, presets, published models, and tensor parallel plans."""
