"""Calls as programs: written once for arrays that lie alike, and played ever after."""
