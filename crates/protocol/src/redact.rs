//! `Debug` of the messages that carry secrets, and addresses without theirs.

use std::fmt;

use crate::agent::{
    AgentCredentials, BasicAuth, ClaimCredentialsRequest, GitCredentialResponse, JobOffer, RevokeGitTokenRequest,
    StoredArchive, UploadTarget,
};

impl fmt::Debug for BasicAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BasicAuth").field("user", &self.user).finish_non_exhaustive()
    }
}

impl fmt::Debug for JobOffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobOffer")
            .field("job", &self.job)
            .field("workflow", &self.workflow)
            .field("job_name", &self.job_name)
            .field("spec_bytes", &self.spec_json.len())
            .field("request_id", &self.request_id)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for ClaimCredentialsRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClaimCredentialsRequest").finish_non_exhaustive()
    }
}

impl fmt::Debug for AgentCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentCredentials").field("agent_id", &self.agent_id).finish_non_exhaustive()
    }
}

impl fmt::Debug for GitCredentialResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GitCredentialResponse").field("expires_at_us", &self.expires_at_us).finish_non_exhaustive()
    }
}

impl fmt::Debug for RevokeGitTokenRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RevokeGitTokenRequest")
            .field("job", &self.job)
            .field("host", &self.host)
            .field("repo", &self.repo)
            .finish_non_exhaustive()
    }
}

/// An address without its query, which may let its bearer in.
pub fn without_query(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or_default()
}

impl fmt::Debug for StoredArchive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredArchive")
            .field("url", &without_query(&self.url))
            .field("size", &self.size)
            .field("sha256", &self.sha256)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for UploadTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UploadTarget")
            .field("upload_id", &self.upload_id)
            .field("url", &without_query(&self.url))
            .field("max_bytes", &self.max_bytes)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::CheckoutSource;

    #[test]
    fn no_secret_is_printed() {
        let basic = Some(BasicAuth { user: "x-access-token".into(), secret: "ghs_hush".into() });
        let offer = JobOffer {
            checkout: Some(CheckoutSource { basic: basic.clone(), ..Default::default() }),
            mask: vec!["hush-too".into()],
            spec_json: "hush env".into(),
            ..Default::default()
        };
        let minted = GitCredentialResponse { secret: "ghs_hush".into(), ..Default::default() };
        let revoke = RevokeGitTokenRequest { secret: "ghs_hush".into(), ..Default::default() };
        let archive = StoredArchive { url: "/objects/v1/x?sig=hush".into(), ..Default::default() };
        let upload = UploadTarget { url: "https://h/objects/v1/x?sig=hush#hush".into(), ..Default::default() };
        for text in [format!("{minted:?}"), format!("{revoke:?}"), format!("{archive:?}"), format!("{upload:?}")] {
            assert!(!text.contains("hush"), "{text}");
        }
        let claim = ClaimCredentialsRequest { claim_code: "kici_claim_hush".into() };
        let claimed = AgentCredentials { agent_token: "kici_agent_-hush".into(), ..Default::default() };
        for text in [format!("{claim:?}"), format!("{claimed:?}")] {
            assert!(!text.contains("hush"), "{text}");
        }
        for text in [format!("{offer:?}"), format!("{basic:?}"), format!("{:?}", offer.checkout)] {
            assert!(!text.contains("hush"), "{text}");
        }
    }
}
