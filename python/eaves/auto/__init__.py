"""Modules whose import installs eaves in a library that can import a module by its name."""
