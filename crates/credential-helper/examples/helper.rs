//! A job's socket with a forge made up on the spot, and git asking it: needs `git` on the PATH.
//!
//! Run without arguments it is the agent; git starts it again as its helper.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use kici_credential_helper::permission::Permissions;
use kici_credential_helper::repository::{Case, Repository};
use kici_credential_helper::server::{Door, Service};
use kici_credential_helper::service::{
    Ask, GitCredentials, GitService, Granted, Host, MintError, Minted, Scope, Upstream, Watch,
};
use kici_credential_helper::{helper, wire};
use kici_engine::time::{ManualClock, Ts};
use secrecy::SecretString;
use tokio::io::AsyncWriteExt as _;

struct Forge;

#[async_trait::async_trait]
impl Upstream for Forge {
    async fn mint(&self, ask: &Ask) -> Result<Minted, MintError> {
        println!("asked for {} of {}", ask.permissions, ask.repository);
        let granted = Granted::Scoped(Permissions::push());
        Ok(Minted { user: "x-access-token".into(), secret: "made-up".into(), granted, expires_at: None })
    }

    async fn revoke(&self, ask: &Ask, _: &SecretString) {
        println!("ended a token for {}", ask.repository);
    }
}

impl Watch for Forge {
    fn mask(&self, values: &[&str]) {
        println!("{} values to mask", values.len());
    }

    fn count(&self, outcome: &'static str) {
        println!("outcome: {outcome}");
    }
}

async fn ask_git(program: &Path, socket: &Path) -> std::io::Result<String> {
    let helper = format!("!'{}' '{}'", program.display(), socket.display());
    let mut git = tokio::process::Command::new("git")
        .args(["-c", "credential.helper=", "-c", &format!("credential.helper={helper}")])
        .args(["-c", "credential.useHttpPath=true", "credential", "fill"])
        .env("GIT_TERMINAL_PROMPT", "0")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = git.stdin.take() {
        stdin.write_all(b"protocol=https\nhost=git.example.com\npath=acme/app.git\n\n").await?;
    }
    Ok(String::from_utf8_lossy(&git.wait_with_output().await?.stdout).into_owned())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, socket, operation] = &arguments[..] {
        helper::run(Path::new(socket), operation, std::io::stdin(), std::io::stdout());
        return Ok(());
    }
    let host = Host { protocol: "https".into(), host: "git.example.com".into(), case: Case::Ignored };
    let own = Repository::parse("https", "git.example.com", "acme/app", Case::Ignored)?;
    let scope = Scope { hosts: vec![host], own: Some(own) };
    let git =
        GitCredentials::new(scope, Arc::new(Forge), Arc::new(Forge), Arc::new(ManualClock::new(Ts::from_micros(0))));
    let service: Arc<dyn Service> = Arc::new(GitService(git.clone()));
    let dir = std::env::temp_dir().join(format!("kici-example-{}", std::process::id()));
    let door = Door::open(&dir, nix::unistd::geteuid().as_raw(), [("git", service)].into())?;
    print!("{}", ask_git(&std::env::current_exe()?, door.socket()).await?);
    let (window, _) = git.open(wire::git::Want::default()).await?;
    print!("{}", ask_git(&std::env::current_exe()?, door.socket()).await?);
    git.close(window).await;
    door.close().await;
    Ok(())
}
