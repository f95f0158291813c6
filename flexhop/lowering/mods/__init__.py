"""Facts about mods, read from their graphs, and their code for the holes of templates."""
