"""Modules that install eaves on import, for libraries that can import a module by its name."""
