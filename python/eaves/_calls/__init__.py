"""Calls of the public functions: the record of each call's arguments, their checks, and the choice of an
implementation."""
