# Copyright (c) the d2_memfit developers.
"""Small tools of all packages. Import the module that has what you need."""
