# Builds the image with Docker alone; `cargo xtask image` builds the same one without it.
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo xtask setup
RUN cargo xtask image --rootfs-only

FROM scratch
COPY --from=build /src/target/image/rootfs/ /
# Attaching to pods' interfaces needs root with SYS_ADMIN and NET_ADMIN: see deploy/ for the rights it gets.
ENTRYPOINT ["/usr/bin/coil-guard"]
CMD ["run"]
