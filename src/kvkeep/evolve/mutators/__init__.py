"""What makes new programs from old ones: the grammar, a language model, a recording."""
