"""A round: drafting, one verification, and what is kept of it. Read `decode` first."""
