"""From names to layouts: sets of rules, their files, presets, published models, tensor parallel plans. Pure."""
