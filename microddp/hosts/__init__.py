"""A cluster in a box, ``python -m microddp.hosts --help``: hosts with links of known speed."""

from microddp.hosts.calibration import Measured, calibrate, calibration_table
from microddp.hosts.cluster import Cluster
from microddp.hosts.link import Box, Link, Uplink, human_bits, links_of_this_job, relink
