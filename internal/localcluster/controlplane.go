package localcluster

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
)

// The groups of the certificates of Ashlar's own programs.
const (
	agentGroup      = "ashlar:agents"
	controllerGroup = "ashlar:controllers"
)

// freePorts finds n ports that nothing listens on. They are not reserved: a
// process that takes one before the cluster does makes a part fail, visibly.
func freePorts(n int) ([]int, error) {
	ports := make([]int, n)
	for i := range ports {
		// Each listener stays open until all are found, so that none is found twice.
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("find a free port: %w", err)
		}
		defer l.Close()
		ports[i] = l.Addr().(*net.TCPAddr).Port
	}
	return ports, nil
}

// startControlPlane brings up etcd, the apiserver, the controllers and the
// scheduler, and returns when the apiserver answers and knows the roles.
func (c *Cluster) startControlPlane(ctx context.Context) error {
	ports, err := freePorts(5)
	if err != nil {
		return err
	}
	etcdPort, peerPort, apiPort, kcmPort, schedulerPort := ports[0], ports[1], ports[2], ports[3], ports[4]
	server := fmt.Sprintf("https://127.0.0.1:%d", apiPort)
	etcdURL := fmt.Sprintf("https://127.0.0.1:%d", etcdPort)
	c.state.Server = server

	certs := c.path("certs")
	if err := os.MkdirAll(certs, 0o700); err != nil {
		return err
	}
	if c.ca, err = newAuthority(certs); err != nil {
		return fmt.Errorf("certificate authority: %w", err)
	}
	for _, name := range []string{"etcd", "apiserver", "kubelet-client"} {
		groups := []string{"system:masters"}
		if name == "etcd" {
			groups = nil
		}
		if _, _, err := c.ca.issue(name, name, groups...); err != nil {
			return err
		}
	}
	if err := writeSigningKey(c.ca.path("service-account.key")); err != nil {
		return err
	}
	for name, user := range map[string]string{"controller-manager": "system:kube-controller-manager", "scheduler": "system:kube-scheduler"} {
		if err := c.ca.kubeconfig(c.path(name+".kubeconfig"), server, name, user); err != nil {
			return err
		}
	}
	if err := c.ca.kubeconfig(c.state.Kubeconfig, server, "admin", "admin", "system:masters"); err != nil {
		return err
	}
	ca := c.ca.path

	peerURL := fmt.Sprintf("https://127.0.0.1:%d", peerPort)
	if err := c.procs.start(ctx, command{name: "etcd", path: c.options.Binaries["etcd"], args: []string{
		"--name=ashlar", "--data-dir=" + c.path("etcd"),
		"--listen-client-urls=" + etcdURL, "--advertise-client-urls=" + etcdURL,
		"--listen-peer-urls=" + peerURL, "--initial-advertise-peer-urls=" + peerURL, "--initial-cluster=ashlar=" + peerURL,
		"--cert-file=" + ca("etcd.crt"), "--key-file=" + ca("etcd.key"), "--client-cert-auth", "--trusted-ca-file=" + ca("ca.crt"),
		"--peer-cert-file=" + ca("etcd.crt"), "--peer-key-file=" + ca("etcd.key"), "--peer-client-cert-auth", "--peer-trusted-ca-file=" + ca("ca.crt"),
		// The data does not outlive the cluster, so it need not reach the disk.
		"--unsafe-no-fsync", "--log-level=warn",
	}}); err != nil {
		return err
	}
	if err := c.procs.start(ctx, command{name: "kube-apiserver", path: c.options.Binaries["kube-apiserver"], args: []string{
		"--etcd-servers=" + etcdURL, "--etcd-cafile=" + ca("ca.crt"), "--etcd-certfile=" + ca("apiserver.crt"), "--etcd-keyfile=" + ca("apiserver.key"),
		"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", apiPort),
		"--tls-cert-file=" + ca("apiserver.crt"), "--tls-private-key-file=" + ca("apiserver.key"), "--client-ca-file=" + ca("ca.crt"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + ca("service-account.key"),
		"--service-account-signing-key-file=" + ca("service-account.key"), "--service-cluster-ip-range=10.96.0.0/16",
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--endpoint-reconciler-type=none",
		"--kubelet-certificate-authority=" + ca("ca.crt"), "--kubelet-client-certificate=" + ca("kubelet-client.crt"),
		"--kubelet-client-key=" + ca("kubelet-client.key"), "--kubelet-preferred-address-types=InternalIP", "--allow-privileged",
	}}); err != nil {
		return err
	}
	admin, err := clientcmd.BuildConfigFromFlags("", c.state.Kubeconfig)
	if err != nil {
		return err
	}
	admin.QPS, admin.Burst = 100, 200
	if c.client, err = kubernetes.NewForConfig(admin); err != nil {
		return err
	}
	err = c.await(ctx, "kube-apiserver", time.Minute, func(ctx context.Context) error {
		return c.client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
	if err != nil {
		return err
	}
	if err := c.createRole(ctx, "ashlar-agent", agentGroup, agentRules); err != nil {
		return fmt.Errorf("role of the agents: %w", err)
	}
	if err := c.createRole(ctx, "ashlar-controller", controllerGroup, controllerRules); err != nil {
		return fmt.Errorf("role of the controller: %w", err)
	}
	if err := c.installCRDs(ctx); err != nil {
		return fmt.Errorf("the kinds of Ashlar: %w", err)
	}
	if err := c.procs.start(ctx, command{name: "kube-controller-manager", path: c.options.Binaries["kube-controller-manager"], args: []string{
		"--kubeconfig=" + c.path("controller-manager.kubeconfig"), "--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", kcmPort),
		"--service-account-private-key-file=" + ca("service-account.key"), "--root-ca-file=" + ca("ca.crt"),
		"--use-service-account-credentials", "--leader-elect=false", "--profiling=false",
	}}); err != nil {
		return err
	}
	if err := c.procs.start(ctx, command{name: "kube-scheduler", path: c.options.Binaries["kube-scheduler"], args: []string{
		"--kubeconfig=" + c.path("scheduler.kubeconfig"), "--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", schedulerPort),
		"--leader-elect=false",
	}}); err != nil {
		return err
	}
	config := c.path("controller.kubeconfig")
	if err := c.ca.kubeconfig(config, server, "controller", "ashlar-controller", controllerGroup); err != nil {
		return err
	}
	args := append([]string{"run", "--kubeconfig=" + config}, c.options.ControllerArgs...)
	return c.procs.start(ctx, command{name: "ashlar-controller", path: c.options.Controller, args: args})
}

func writeSigningKey(path string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600)
}

// agentRules are what an agent may do, as cmd/ashlar-agent documents it.
var agentRules = []rbacv1.PolicyRule{
	{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch", "patch"}},
	{APIGroups: []string{""}, Resources: []string{"nodes/status"}, Verbs: []string{"patch"}},
	{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "watch"}},
	{APIGroups: []string{""}, Resources: []string{"pods/eviction"}, Verbs: []string{"create"}},
	{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"gpunodes"}, Verbs: []string{"get", "list", "watch", "create", "update"}},
	{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"gpunodes/status"}, Verbs: []string{"update", "patch"}},
}

// controllerRules are what the controller may do, as cmd/ashlar-controller
// documents it.
var controllerRules = []rbacv1.PolicyRule{
	{APIGroups: []string{""}, Resources: []string{"nodes", "pods"}, Verbs: []string{"get", "list", "watch"}},
	{APIGroups: []string{"", "events.k8s.io"}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"gpunodes"}, Verbs: []string{"get", "list", "watch", "patch", "update"}},
}

// createRole lets a group of users do what the rules say, and no more.
func (c *Cluster) createRole(ctx context.Context, name, group string, rules []rbacv1.PolicyRule) error {
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: group}},
	}
	// The apiserver answers /readyz a moment before it lets everything through.
	return c.await(ctx, "kube-apiserver", 30*time.Second, func(ctx context.Context) error {
		_, err := c.client.RbacV1().ClusterRoles().Create(ctx, role, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		_, err = c.client.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	})
}

// installCRDs makes Ashlar's own kinds known, and returns when they are served.
func (c *Cluster) installCRDs(ctx context.Context) error {
	files, err := v1alpha1.CRDs.ReadDir("crds")
	if err != nil {
		return err
	}
	rest := c.client.Discovery().RESTClient()
	for _, file := range files {
		text, err := v1alpha1.CRDs.ReadFile("crds/" + file.Name())
		if err != nil {
			return err
		}
		data, err := yaml.YAMLToJSON(text)
		if err != nil {
			return fmt.Errorf("%s: %w", file.Name(), err)
		}
		err = c.await(ctx, "kube-apiserver", 30*time.Second, func(ctx context.Context) error {
			err := rest.Post().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").
				SetHeader("Content-Type", "application/json").Body(data).Do(ctx).Error()
			if apierrors.IsAlreadyExists(err) {
				return nil
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("%s: %w", file.Name(), err)
		}
	}
	return c.await(ctx, "kube-apiserver", 30*time.Second, func(ctx context.Context) error {
		return rest.Get().AbsPath("/apis/" + v1alpha1.GroupVersion.String() + "/gpunodes").Do(ctx).Error()
	})
}

// await calls check until it succeeds. Its error names the part that is waited
// for, the last reason, and the end of the part's log.
func (c *Cluster) await(ctx context.Context, part string, limit time.Duration, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var last error
	for {
		if err := check(ctx); err == nil {
			return nil
		} else if last == nil || ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return context.Cause(ctx)
			}
			log := filepath.Join(c.path("logs"), filepath.FromSlash(part)+".log")
			return fmt.Errorf("%s is not ready after %s: %w\nend of %s:\n%s", part, limit, last, log, tail(log, 15))
		case <-time.After(200 * time.Millisecond):
		}
	}
}
