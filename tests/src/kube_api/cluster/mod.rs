//! What Coil and the controllers do around an Egress.
