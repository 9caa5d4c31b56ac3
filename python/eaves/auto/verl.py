"""Calls eaves.verl.install() on import. Each process of verl imports the modules named by VERL_USE_EXTERNAL_MODULES or
external_lib."""

from eaves.verl import install

install()
