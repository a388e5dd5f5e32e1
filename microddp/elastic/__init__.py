"""Ranks that come and go; the others meet anew, without a restart."""

from microddp.elastic.generation import Generation
from microddp.elastic.members import Members
