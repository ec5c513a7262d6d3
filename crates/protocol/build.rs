//! Compiles `proto/` with protox, so that no `protoc` is needed.

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = PathBuf::from("../../proto");
    let files = ["kici/common/v1/common.proto", "kici/agent/v1/agent.proto"];
    for file in files {
        println!("cargo::rerun-if-changed={}", root.join(file).display());
    }
    let descriptors = protox::compile(files, [&root])?;
    tonic_prost_build::configure()
        .build_transport(true)
        .bytes(".kici.agent.v1.LogData.data")
        .bytes(".kici.agent.v1.JobOffer.spec_json")
        // They carry credentials, rendered environments and signed addresses; `redact.rs` writes a Debug that does not show them.
        .skip_debug([
            ".kici.agent.v1.BasicAuth",
            ".kici.agent.v1.JobOffer",
            ".kici.agent.v1.GitCredentialResponse",
            ".kici.agent.v1.RevokeGitTokenRequest",
            ".kici.agent.v1.StoredArchive",
            ".kici.agent.v1.UploadTarget",
            ".kici.agent.v1.ClaimCredentialsRequest",
            ".kici.agent.v1.AgentCredentials",
        ])
        .compile_fds(descriptors)?;
    Ok(())
}
