# The static commands `turnstile` and `turnstile-gateway`, started once by .ci/static, and the roots for TLS. From a commit:
#   git archive HEAD | docker build -t turnstile -
FROM rust:1 AS build
WORKDIR /source
COPY . .
RUN .ci/static

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /source/target/static/ /
USER 65534:65534
ENTRYPOINT ["/turnstile"]
