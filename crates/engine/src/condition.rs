//! Conditions on a JSON document: `match` and `not` of triggers (workflows-and-events R24).
