"""The part of a model that one rank of several has."""
