//! What is in `deploy/`: that it renders, is accepted, asks for no more than is needed, and fits the agent.

mod agent;
mod node;
mod observability;
mod rendering;
mod rights;
