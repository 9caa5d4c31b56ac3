"""eaves.verl.install() as an import: each process of verl imports the modules that VERL_USE_EXTERNAL_MODULES or
external_lib name."""

from eaves.verl import install

install()
