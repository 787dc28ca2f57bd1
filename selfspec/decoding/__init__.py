"""A round: drafting, one verification, and the commit of accepted drafts. Read `decode` first."""
