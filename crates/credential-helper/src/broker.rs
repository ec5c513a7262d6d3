//! The orchestrator's half, as far as it can be decided from values: which credential a job may have.
//!
//! Everything here comes from the orchestrator's own rows; of what the agent says only the wish counts. A refusal has a reason
//! for the audit log and one sentence for everybody else.

#[cfg(test)]
mod tests;

use kici_engine::event::{Event, ForkState};
use kici_engine::lock::{GitAccess, GitCredentials, NamedCredential};
use kici_engine::pattern::Patterns;

use crate::permission::{Level, Permissions};
use crate::repository::{Case, Repository, canonical_host};

/// Permissions of a GitHub App that are about one repository's contents and what is worked on there. Those that guard the
/// repository (`administration`, `secrets`, `environments`) or belong to the organization are never given to a job.
const GIVEN: [&str; 11] = [
    "actions",
    "checks",
    "contents",
    "deployments",
    "issues",
    "metadata",
    "packages",
    "pages",
    "pull_requests",
    "statuses",
    "workflows",
];
/// What reading takes.
const TO_READ: [&str; 2] = ["contents", "metadata"];

/// What everybody is told who is refused.
pub const REFUSED: &str = "credential not available";

/// Whether a job runs what its repository's own people wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// It does.
    Trusted,
    /// It runs a pull request of a fork, or one of which that is not known.
    Untrusted,
}

impl Trust {
    /// The trust in what an event brought.
    pub fn of(event: &Event) -> Self {
        if event.is_fork_pr == ForkState::No { Self::Trusted } else { Self::Untrusted }
    }
}

/// Where the source of a job lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceHost {
    /// `https` or `http`.
    pub protocol: String,
    /// Canonical.
    pub host: String,
    /// How it compares names.
    pub case: Case,
}

/// What is known of a job.
#[derive(Clone, Copy, Debug)]
pub struct JobFacts<'a> {
    /// Where its source lives; none when the source needs no credentials (a repository on a disk).
    pub source: Option<&'a SourceHost>,
    /// Its repository as the run has it.
    pub repo: &'a str,
    /// What its workflow declares.
    pub declared: &'a GitCredentials,
    /// Whether its code is trusted.
    pub trust: Trust,
}

/// What an agent asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish<'a> {
    /// Host as written.
    pub host: &'a str,
    /// `owner/name` as written.
    pub repo: &'a str,
    /// What the credential must allow.
    pub permissions: &'a Permissions,
    /// A named credential.
    pub credential: Option<&'a str>,
}

/// The credential that a job gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice<'a> {
    /// Which repository.
    pub repository: Repository,
    /// With what.
    pub with: With<'a>,
}

/// Which credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum With<'a> {
    /// The source's.
    Source,
    /// One of the workflow's.
    Named(&'a str, &'a NamedCredential),
}

impl With<'_> {
    /// The word in the audit log.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Named(_, named) => named.material.kind(),
        }
    }
}

/// Why a job gets none. For the audit log, not for the job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The wish makes no sense.
    #[error("the repository cannot be read from the request: {0}")]
    Invalid(&'static str),
    /// `git_credentials: false`.
    #[error("the workflow sets `git_credentials: false`")]
    Disabled,
    /// No such name.
    #[error("the workflow declares no credential of that name")]
    NotDeclared,
    /// Code of a fork.
    #[error("the job runs an untrusted pull request, which gets no credential that a workflow declares")]
    Untrusted,
    /// Not a host of the job.
    #[error("the host is neither the source's nor that of a declared credential")]
    OtherHost,
    /// Not a repository of the job.
    #[error("the repository is neither the job's own nor listed in `git_credentials.repos`")]
    OtherRepository,
    /// Write without the declaration.
    #[error("the workflow does not set `git_credentials.access: write`")]
    ReadOnly,
    /// Write beyond the fence.
    #[error("the repository belongs to another owner than the job's, and credentials write only within one owner")]
    OtherOwner,
    /// More than write.
    #[error("`{0}=admin` is never given to a job")]
    Admin(String),
    /// A permission that no job gets.
    #[error("`{0}` is not among the permissions that a job can have")]
    NotGiven(String),
    /// More than reading without the declaration.
    #[error("without `git_credentials.access: write` a job may only read `contents` and `metadata`, not `{0}`")]
    Undeclared(String),
    /// Permissions that untrusted code does not get.
    #[error("an untrusted job may only read `contents` and `metadata`, not `{0}`")]
    Narrow(String),
}

/// Decides, in this order: what is written for the job, whose credential it is, which repositories it reaches, how far it goes.
///
/// # Errors
/// [`Refusal`].
pub fn authorize<'a>(facts: JobFacts<'a>, wish: &Wish<'_>) -> Result<Choice<'a>, Refusal> {
    let declared = facts.declared;
    if !declared.enabled {
        return Err(Refusal::Disabled);
    }
    if wish.permissions.is_empty() {
        return Err(Refusal::Invalid("no permission is named"));
    }
    if let Some((name, _)) = wish.permissions.iter().find(|(_, level)| *level > Level::Write) {
        return Err(Refusal::Admin(name.to_owned()));
    }
    if let Some((name, _)) = wish.permissions.iter().find(|(name, _)| !GIVEN.contains(name)) {
        return Err(Refusal::NotGiven(name.to_owned()));
    }
    let of_source = facts
        .source
        .filter(|source| canonical_host(&source.protocol, wish.host).is_some_and(|host| host == source.host));
    let (protocol, case) = match of_source {
        Some(source) => (source.protocol.as_str(), source.case),
        None => ("https", Case::Significant),
    };
    let repository = Repository::parse(protocol, wish.host, wish.repo, case)
        .map_err(|_| Refusal::Invalid("it is not HOST and OWNER/NAME"))?;
    let with = choose(facts, wish, &repository, of_source.is_some())?;
    match with {
        With::Source => within_source(facts, wish, &repository)?,
        With::Named(_, named) => {
            let scoped = !matches!(named.material, kici_engine::lock::CredentialMaterial::Basic { .. });
            // A password cannot be narrowed: who declares it for a host has said how far it goes.
            if scoped && wish.permissions.writes() {
                same_owner(facts, &repository)?;
            }
        }
    }
    Ok(Choice { repository, with })
}

fn choose<'a>(
    facts: JobFacts<'a>,
    wish: &Wish<'_>,
    repository: &Repository,
    source_host: bool,
) -> Result<With<'a>, Refusal> {
    let named = &facts.declared.named;
    let fits = |credential: &NamedCredential| match &credential.host {
        Some(host) => canonical_host("https", wish.host) == canonical_host("https", host),
        None => source_host,
    };
    if let Some(name) = wish.credential {
        let (name, credential) = named.get_key_value(name).ok_or(Refusal::NotDeclared)?;
        if facts.trust == Trust::Untrusted {
            return Err(Refusal::Untrusted);
        }
        return if fits(credential) { Ok(With::Named(name, credential)) } else { Err(Refusal::OtherHost) };
    }
    let case = facts.source.filter(|_| source_host).map_or(Case::Significant, |source| source.case);
    let chosen = named
        .iter()
        .find(|(_, credential)| {
            fits(credential) && !credential.repos.is_empty() && lists(&credential.repos, repository.path(), case)
        })
        .or_else(|| named.get_key_value(facts.declared.default.as_ref()?).filter(|(_, credential)| fits(credential)));
    match (chosen, facts.trust) {
        (Some((name, credential)), Trust::Trusted) => Ok(With::Named(name, credential)),
        // Untrusted code gets what the source gives to everybody who may read it, and nothing else.
        _ if source_host => Ok(With::Source),
        (Some(_), Trust::Untrusted) => Err(Refusal::Untrusted),
        _ => Err(Refusal::OtherHost),
    }
}

fn within_source(facts: JobFacts<'_>, wish: &Wish<'_>, repository: &Repository) -> Result<(), Refusal> {
    let own = own(facts).is_some_and(|own| own == *repository);
    let wide = || wish.permissions.iter().find(|(name, _)| !TO_READ.contains(name)).map(|(name, _)| name.to_owned());
    if facts.trust == Trust::Untrusted {
        if !own {
            return Err(Refusal::OtherRepository);
        }
        if wish.permissions.writes() {
            return Err(Refusal::Untrusted);
        }
        return wide().map_or(Ok(()), |name| Err(Refusal::Narrow(name)));
    }
    let case = facts.source.map_or(Case::Significant, |source| source.case);
    let listed = || !facts.declared.repos.is_empty() && lists(&facts.declared.repos, repository.path(), case);
    if !own && !listed() {
        return Err(Refusal::OtherRepository);
    }
    match (facts.declared.access, wish.permissions.writes()) {
        (GitAccess::Read, true) => Err(Refusal::ReadOnly),
        (GitAccess::Read, false) => wide().map_or(Ok(()), |name| Err(Refusal::Undeclared(name))),
        (GitAccess::Write, true) => same_owner(facts, repository),
        (GitAccess::Write, false) => Ok(()),
    }
}

fn own(facts: JobFacts<'_>) -> Option<Repository> {
    let source = facts.source?;
    Repository::parse(&source.protocol, &source.host, facts.repo, source.case).ok()
}

fn same_owner(facts: JobFacts<'_>, repository: &Repository) -> Result<(), Refusal> {
    let same = own(facts).is_some_and(|own| {
        own.owner().is_some() && own.owner() == repository.owner() && own.host() == repository.host()
    });
    if same { Ok(()) } else { Err(Refusal::OtherOwner) }
}

/// Whether a list of patterns selects a repository. A pattern that does not compile selects nothing.
fn lists(patterns: &[String], repo: &str, case: Case) -> bool {
    let folded = |pattern: &String| {
        let regex = pattern.trim_start_matches('!').starts_with('/').then(|| pattern.rsplit_once('/')).flatten();
        match (case, regex) {
            (Case::Significant, _) => pattern.clone(),
            (Case::Ignored, None) => pattern.to_ascii_lowercase(),
            // Folding the text would turn `\S` into `\s`.
            (Case::Ignored, Some((_, flags))) if flags.contains('i') => pattern.clone(),
            (Case::Ignored, Some(_)) => format!("{pattern}i"),
        }
    };
    let patterns: Vec<String> = patterns.iter().map(folded).collect();
    Patterns::compile(&patterns).is_ok_and(|patterns| patterns.matches(repo))
}
