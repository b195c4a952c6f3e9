"""Recurrent layers over packed rows: short convolutions and linear recurrences."""
