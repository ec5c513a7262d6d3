use kici_engine::lock::{CredentialMaterial, Material};
use proptest::prelude::*;

use super::*;

fn value(text: &str) -> Material {
    Material::Value(text.to_owned())
}

fn basic(host: Option<&str>, repos: &[&str]) -> NamedCredential {
    NamedCredential {
        host: host.map(str::to_owned),
        repos: repos.iter().map(|repo| (*repo).to_owned()).collect(),
        material: CredentialMaterial::Basic { user: value("u"), token: value("t") },
    }
}

fn app(repos: &[&str]) -> NamedCredential {
    let material =
        CredentialMaterial::GithubApp { app_id: value("1"), private_key: value("k"), installation_id: value("2") };
    NamedCredential { material, ..basic(None, repos) }
}

fn source() -> SourceHost {
    SourceHost { protocol: "https".into(), host: "git.example".into(), case: Case::Ignored }
}

/// What comes of a wish, in one word or two.
fn outcome(declared: &GitCredentials, trust: Trust, host: &str, repo: &str, permissions: &str, name: &str) -> String {
    let source = source();
    let facts = JobFacts { source: Some(&source), repo: "Acme/App", declared, trust };
    let permissions = Permissions::parse(permissions.split(',').filter(|text| !text.is_empty())).expect("permissions");
    let wish = Wish { host, repo, permissions: &permissions, credential: (!name.is_empty()).then_some(name) };
    match authorize(facts, &wish) {
        Ok(Choice { with: With::Source, .. }) => "source".to_owned(),
        Ok(Choice { with: With::Named(name, _), .. }) => name.to_owned(),
        Err(refusal) => format!("{refusal:?}"),
    }
}

#[test]
fn the_source_credential_reads_its_own_repository_and_what_is_declared() {
    use Trust::{Trusted, Untrusted};
    let plain = GitCredentials::default();
    let off = GitCredentials { enabled: false, ..plain.clone() };
    let wide = GitCredentials {
        repos: vec!["acme/*".into(), "Other/lib".into(), "!acme/secret".into(), r"/^third\/\S+$/".into()],
        access: GitAccess::Write,
        ..plain.clone()
    };
    let (read, write) = ("contents=read", "contents=write");
    let table = [
        (&plain, Trusted, "git.example", "acme/app", read, "source"),
        (&plain, Trusted, "GIT.example:443", "/Acme/App.git/info/lfs", read, "source"),
        (&plain, Trusted, "git.example", "acme/app", "contents=read,metadata=read", "source"),
        (&plain, Trusted, "git.example", "acme/app", "issues=read", "Undeclared(\"issues\")"),
        (&plain, Trusted, "git.example", "acme/app", write, "ReadOnly"),
        (&plain, Trusted, "git.example", "acme/lib", read, "OtherRepository"),
        (&plain, Trusted, "git.example:8443", "acme/app", read, "OtherHost"),
        (&plain, Trusted, "evil.example", "acme/app", read, "OtherHost"),
        (&plain, Trusted, "git.example", "acme/app", "", "Invalid(\"no permission is named\")"),
        (&plain, Trusted, "git.example", "", read, "Invalid(\"it is not HOST and OWNER/NAME\")"),
        (&off, Trusted, "git.example", "acme/app", read, "Disabled"),
        (&wide, Trusted, "git.example", "acme/lib", read, "source"),
        (&wide, Trusted, "git.example", "ACME/Lib", read, "source"),
        (&wide, Trusted, "git.example", "other/lib", read, "source"),
        (&wide, Trusted, "git.example", "third/Thing", read, "source"),
        (&wide, Trusted, "git.example", "acme/secret", read, "OtherRepository"),
        (&wide, Trusted, "git.example", "acme/app", write, "source"),
        (&wide, Trusted, "git.example", "acme/app", "contents=write,workflows=write,issues=read", "source"),
        (&wide, Trusted, "git.example", "acme/lib", write, "source"),
        (&wide, Trusted, "git.example", "other/lib", write, "OtherOwner"),
        (&wide, Trusted, "git.example", "acme/app", "contents=admin", "Admin(\"contents\")"),
        (&wide, Untrusted, "git.example", "acme/app", read, "source"),
        (&wide, Untrusted, "git.example", "acme/app", "metadata=read", "source"),
        (&wide, Untrusted, "git.example", "acme/app", "issues=read", "Narrow(\"issues\")"),
        (&wide, Untrusted, "git.example", "acme/app", write, "Untrusted"),
        (&wide, Untrusted, "git.example", "acme/lib", read, "OtherRepository"),
    ];
    for (declared, trust, host, repo, permissions, expected) in table {
        let found = outcome(declared, trust, host, repo, permissions, "");
        assert_eq!(found, expected, "{trust:?} {host} {repo} {permissions}");
    }
}

#[test]
fn named_credentials_are_those_of_the_map_and_never_for_forks() {
    use Trust::{Trusted, Untrusted};
    let named = [
        ("mirror".to_owned(), basic(Some("mirror.example"), &["team/*"])),
        ("bot".to_owned(), app(&["acme/lib"])),
        ("other".to_owned(), basic(None, &[])),
    ];
    let plain = GitCredentials { named: named.into(), ..Default::default() };
    let by_default = GitCredentials { default: Some("other".into()), ..plain.clone() };
    let (read, write, here) = ("contents=read", "contents=write", "git.example");
    let table = [
        (&plain, Trusted, here, "acme/app", read, "", "source"),
        (&plain, Trusted, here, "acme/lib", read, "", "bot"),
        (&plain, Trusted, here, "acme/lib", write, "", "bot"),
        (&plain, Trusted, here, "acme/app", read, "bot", "bot"),
        (&plain, Trusted, here, "other/app", read, "bot", "bot"),
        (&plain, Trusted, here, "other/app", write, "bot", "OtherOwner"),
        (&plain, Trusted, here, "acme/app", read, "Bot", "NotDeclared"),
        (&plain, Trusted, here, "acme/app", read, "bot ", "NotDeclared"),
        (&plain, Trusted, here, "acme/app", read, "mirror", "OtherHost"),
        (&plain, Trusted, "mirror.example", "team/x", read, "", "mirror"),
        (&plain, Trusted, "mirror.example", "elsewhere/x", read, "", "OtherHost"),
        (&plain, Trusted, "mirror.example", "elsewhere/x", write, "mirror", "mirror"),
        (&by_default, Trusted, here, "acme/app", read, "", "other"),
        (&by_default, Trusted, here, "acme/lib", read, "", "bot"),
        (&by_default, Trusted, "mirror.example", "elsewhere/x", read, "", "OtherHost"),
        (&plain, Untrusted, here, "acme/app", read, "bot", "Untrusted"),
        (&plain, Untrusted, here, "acme/lib", read, "", "OtherRepository"),
        (&by_default, Untrusted, here, "acme/app", read, "", "source"),
        (&plain, Untrusted, "mirror.example", "team/x", read, "", "Untrusted"),
    ];
    for (declared, trust, host, repo, permissions, name, expected) in table {
        let found = outcome(declared, trust, host, repo, permissions, name);
        assert_eq!(found, expected, "{trust:?} {host} {repo} {permissions} {name}");
    }
}

#[test]
fn what_guards_a_repository_or_belongs_to_its_organization_is_given_to_nobody() {
    let named = [("bot".to_owned(), app(&[])), ("static".to_owned(), basic(None, &[]))];
    let declared = GitCredentials { access: GitAccess::Write, named: named.into(), ..Default::default() };
    let refused = [
        "administration",
        "environments",
        "members",
        "organization_administration",
        "organization_secrets",
        "repository_hooks",
        "secrets",
        "secret_scanning_alerts",
        "anything_new",
    ];
    for permission in refused {
        for level in ["read", "write"] {
            for name in ["", "bot", "static"] {
                let wish = format!("contents=read,{permission}={level}");
                let found = outcome(&declared, Trust::Trusted, "git.example", "acme/app", &wish, name);
                assert_eq!(found, format!("NotGiven({permission:?})"), "{name}");
            }
        }
    }
}

#[test]
fn a_source_on_a_disk_has_no_credential() {
    let declared = GitCredentials::default();
    let facts = JobFacts { source: None, repo: "local/app", declared: &declared, trust: Trust::Trusted };
    let permissions = Permissions::fetch();
    let wish = Wish { host: "git.example", repo: "local/app", permissions: &permissions, credential: None };
    assert_eq!(authorize(facts, &wish), Err(Refusal::OtherHost));
}

proptest! {
    #[test]
    fn whatever_is_asked_writes_stay_within_the_owner_and_forks_get_their_own_to_read(
        repo in "(acme|other|Acme)/(app|lib|[a-z]{1,3})", write: bool, untrusted: bool, access: bool,
    ) {
        let declared = GitCredentials {
            repos: vec!["**".into()],
            access: if access { GitAccess::Write } else { GitAccess::Read },
            ..Default::default()
        };
        let source = source();
        let trust = if untrusted { Trust::Untrusted } else { Trust::Trusted };
        let facts = JobFacts { source: Some(&source), repo: "acme/app", declared: &declared, trust };
        let permissions = if write { Permissions::push() } else { Permissions::fetch() };
        let wish = Wish { host: "git.example", repo: &repo, permissions: &permissions, credential: None };
        let Ok(choice) = authorize(facts, &wish) else { return Ok(()) };
        prop_assert_eq!(choice.with, With::Source);
        prop_assert!(!write || (access && !untrusted && choice.repository.owner() == Some("acme")));
        prop_assert!(!untrusted || choice.repository.path() == "acme/app");
    }
}
